package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const (
	callbackTime      = time.Minute
	pauseAfterFailure = 100 * time.Millisecond
	sendTries         = 3
)

type startedProducer = rocketmq.Producer

// byKeyOrInTurn sends what has an ordering key to the queue of that key, and the rest to all queues in turn.
type byKeyOrInTurn struct {
	byKey  producer.QueueSelector
	inTurn producer.QueueSelector
}

func (s byKeyOrInTurn) Select(m *primitive.Message, queues []*primitive.MessageQueue, last string) *primitive.MessageQueue {
	if m.GetShardingKey() != "" {
		return s.byKey.Select(m, queues, last)
	}
	return s.inTurn.Select(m, queues, last)
}

func (d *driver) producer(name string) (startedProducer, error) {
	p, ok := d.producers[name]
	if !ok {
		return nil, fmt.Errorf("no such producer: %s", name)
	}
	return p, nil
}

func (d *driver) startProducer(r *request) error {
	options := append([]producer.Option{
		producer.WithGroupName(r.Group),
		producer.WithInstanceName(d.instance()),
		producer.WithNsResolver(primitive.NewPassthroughResolver(d.registry)),
		producer.WithRetry(sendTries - 1),
		producer.WithQueueSelector(byKeyOrInTurn{producer.NewHashQueueSelector(), producer.NewRoundRobinQueueSelector()}),
	}, producersConnect...)
	if r.User != "" {
		options = append(options, producer.WithCredentials(primitive.Credentials{AccessKey: r.User, SecretKey: r.Secret}))
	}
	p, err := rocketmq.NewProducer(options...)
	if err != nil {
		return err
	}
	d.producers[r.Producer] = p
	return p.Start()
}

func (d *driver) send(r *request) (interface{}, error) {
	p, err := d.producer(r.Producer)
	if err != nil {
		return nil, err
	}
	switch r.Way {
	case "sync":
		sent, err := p.SendSync(context.Background(), r.Message.build())
		if err != nil {
			return nil, err
		}
		return viewSent(sent), nil
	case "async":
		return sendAsync(p, r.Message.build())
	case "oneway":
		return nil, p.SendOneWay(context.Background(), r.Message.build())
	default:
		return nil, fmt.Errorf("no such way: %s", r.Way)
	}
}

func sendAsync(p startedProducer, m *primitive.Message) (interface{}, error) {
	type outcome struct {
		sent *primitive.SendResult
		err  error
	}
	outcomes := make(chan outcome, 2) // the client may report one failure twice
	report := func(_ context.Context, sent *primitive.SendResult, err error) { outcomes <- outcome{sent, err} }
	if err := p.SendAsync(context.Background(), report, m); err != nil {
		return nil, err
	}
	select {
	case o := <-outcomes:
		if o.err != nil {
			return nil, o.err
		}
		return viewSent(o.sent), nil
	case <-time.After(callbackTime):
		return nil, fmt.Errorf("no callback within %s", callbackTime)
	}
}

func (d *driver) sendBatch(r *request) (interface{}, error) {
	p, err := d.producer(r.Producer)
	if err != nil {
		return nil, err
	}
	messages := make([]*primitive.Message, 0, len(r.Messages))
	for i := range r.Messages {
		messages = append(messages, r.Messages[i].build())
	}
	sent, err := p.SendSync(context.Background(), messages...)
	if err != nil {
		return nil, err
	}
	return viewSent(sent), nil
}

// stream sends the numbers below count in the background; each again until it is acknowledged.
func (d *driver) stream(r *request) error {
	p, err := d.producer(r.Producer)
	if err != nil {
		return err
	}
	go func() {
		for number := 0; number < r.Count; number++ {
			d.sendUntilAcknowledged(p, r.Topic, strconv.Itoa(number))
			time.Sleep(time.Duration(r.PauseMs) * time.Millisecond)
		}
	}()
	return nil
}

func (d *driver) sendUntilAcknowledged(p startedProducer, topic, text string) {
	for {
		event := object{"event": "refused", "topic": topic, "text": text}
		sent, err := p.SendSync(context.Background(), primitive.NewMessage(topic, []byte(text)))
		if err != nil {
			event["raised"] = raised(err)
		} else if sent.Status == primitive.SendOK {
			event["event"] = "acknowledged"
			d.emit(event)
			return
		}
		d.emit(event)
		time.Sleep(pauseAfterFailure)
	}
}

func (d *driver) request(r *request) (interface{}, error) {
	p, err := d.producer(r.Producer)
	if err != nil {
		return nil, err
	}
	reply, err := p.Request(context.Background(), time.Duration(r.Seconds)*time.Second, r.Message.build())
	if err != nil {
		return nil, err
	}
	return reply.Body, nil
}
