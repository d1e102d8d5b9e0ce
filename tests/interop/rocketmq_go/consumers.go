package main

import (
	"context"
	"fmt"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const (
	pullMessages = 32
	pollTime     = 500 * time.Millisecond
)

type startedConsumer = rocketmq.PushConsumer

func selector(r *request) consumer.MessageSelector {
	if r.SQL {
		return consumer.MessageSelector{Type: consumer.SQL92, Expression: r.Expression}
	}
	return consumer.MessageSelector{Type: consumer.TAG, Expression: r.Expression}
}

func (d *driver) options(r *request) []consumer.Option {
	options := append([]consumer.Option{
		consumer.WithGroupName(r.Group),
		consumer.WithInstance(d.instance()),
		consumer.WithNsResolver(primitive.NewPassthroughResolver(d.registry)),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	}, consumersConnect...)
	if r.User != "" {
		options = append(options, consumer.WithCredentials(primitive.Credentials{AccessKey: r.User, SecretKey: r.Secret}))
	}
	return options
}

func (d *driver) startConsumer(r *request) error {
	options := append(d.options(r), consumer.WithConsumerOrder(r.Orderly))
	if r.Broadcast {
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	if r.MaxReconsumeTimes != nil {
		options = append(options, consumer.WithMaxReconsumeTimes(*r.MaxReconsumeTimes))
	}
	c, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return err
	}
	listen, err := d.listener(*r)
	if err != nil {
		return err
	}
	if err := c.Subscribe(r.Topic, selector(r), listen); err != nil {
		return err
	}
	d.consumers[r.Consumer] = c
	return c.Start()
}

// listener reports each message; it fails all of them, or replies to them, when the request says so.
func (d *driver) listener(r request) (func(context.Context, ...*primitive.MessageExt) (consumer.ConsumeResult, error), error) {
	var replier startedProducer
	if r.Replier != "" {
		var err error
		if replier, err = d.producer(r.Replier); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, m := range messages {
			event := viewMessage(m)
			event["event"] = "message"
			event["consumer"] = r.Consumer
			event["at"] = time.Now().UnixMilli()
			d.emit(event)
			if replier != nil {
				d.reply(replier, m)
			}
		}
		if !r.Failing {
			return consumer.ConsumeSuccess, nil
		}
		if failed, ok := primitive.GetConcurrentlyCtx(ctx); ok {
			failed.DelayLevelWhenNextConsume = 1
		}
		return consumer.ConsumeRetryLater, nil
	}, nil
}

func (d *driver) reply(replier startedProducer, m *primitive.MessageExt) {
	// The second argument becomes properties in this version of the client, so the body is set afterwards.
	reply, err := consumer.CreateReplyMessage(m, nil)
	if err == nil {
		reply.Body = m.Body
		_, err = replier.SendSync(context.Background(), reply)
	}
	if err != nil {
		d.emit(object{"event": "reply_failed", "raised": raised(err)})
	}
}

func (d *driver) stopConsumer(r *request) error {
	c, ok := d.consumers[r.Consumer]
	if !ok {
		return fmt.Errorf("no such consumer: %s", r.Consumer)
	}
	delete(d.consumers, r.Consumer)
	return c.Shutdown()
}

func (d *driver) pullConsumer(r *request) (rocketmq.PullConsumer, error) {
	c, err := rocketmq.NewPullConsumer(d.options(r)...)
	if err != nil {
		return nil, err
	}
	if err := c.Subscribe(r.Topic, selector(r)); err != nil {
		return nil, err
	}
	return c, c.Start()
}

// pull reads everything of a topic that the expression lets through, queue by queue; no queue may be empty, as the
// client waits there for a message.
func (d *driver) pull(r *request) (interface{}, error) {
	a, err := admin.NewAdmin(admin.WithResolver(primitive.NewPassthroughResolver(d.registry)))
	if err != nil {
		return nil, err
	}
	queues, err := a.FetchPublishMessageQueues(context.Background(), r.Topic)
	if err != nil {
		return nil, err
	}
	c, err := d.pullConsumer(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Shutdown() }()
	views := []object{}
	for _, queue := range queues {
		for offset, end := int64(0), int64(1); offset < end; {
			result, err := c.PullFrom(context.Background(), queue, offset, pullMessages)
			if err != nil {
				return nil, err
			}
			if result.Status == primitive.PullFound {
				views = append(views, viewMessages(result.GetMessageExts())...)
			}
			offset, end = result.NextBeginOffset, result.MaxOffset
		}
	}
	return views, nil
}

// poll takes the next count messages of a group, or fewer after the given seconds.
func (d *driver) poll(r *request) (interface{}, error) {
	c, err := d.pullConsumer(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Shutdown() }()
	views := []object{}
	for end := time.Now().Add(time.Duration(r.Seconds) * time.Second); len(views) < r.Count && time.Now().Before(end); {
		polled, err := c.Poll(context.Background(), pollTime)
		if consumer.IsNoNewMsgError(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		views = append(views, viewMessages(polled.GetMsgList())...)
		c.ACK(context.Background(), polled, consumer.ConsumeSuccess)
	}
	return views, nil
}

func (d *driver) createTopic(r *request) error {
	a, err := admin.NewAdmin(admin.WithResolver(primitive.NewPassthroughResolver(d.registry)))
	if err != nil {
		return err
	}
	return a.CreateTopic(
		context.Background(),
		admin.WithTopicCreate(r.Topic),
		admin.WithBrokerAddrCreate(r.Broker),
		admin.WithReadQueueNums(r.Queues),
		admin.WithWriteQueueNums(r.Queues),
	)
}
